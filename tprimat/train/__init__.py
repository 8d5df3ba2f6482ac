"""What every trainer inside torchrun shares: worker, start-up, data, callbacks."""
