"""comera_lab: teach and explore memory-efficient training. `import comera_lab` needs torch and numpy alone."""

__version__ = "0.1.0"
