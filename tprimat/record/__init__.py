"""What happened: the records that runs leave behind, their only reader and writer, and the machine they ran on."""
