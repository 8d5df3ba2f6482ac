"""What happened: the records that runs leave behind, and their only reader and writer."""
