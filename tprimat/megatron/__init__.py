"""The embedded engine: Megatron-Core's model, schedules and optimizer under a Lightning Trainer."""
