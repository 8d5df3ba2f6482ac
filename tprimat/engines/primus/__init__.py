"""AMD's Primus: how it is found, configured and started."""
