"""What to do where an engine's packages are missing."""

NEMO = (
    "make nemo, then .venv-nemo/bin/python benchmark.py --engine nemo "
    "(or: pip install -c constraints-nemo.txt -r requirements-nemo.txt); or --engine megatron"
)
