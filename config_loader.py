"""Read and check config.yaml.

python3 -c "from config_loader import load_config; print(load_config().models['llama'].name)"
"""

from tprimat.config.load import LoadedConfig, load_config, read_config

__all__ = ["LoadedConfig", "load_config", "read_config"]
