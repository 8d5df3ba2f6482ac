"""The engine bridge inside torchrun: Megatron-Bridge's own recipes and its pretrain()."""
