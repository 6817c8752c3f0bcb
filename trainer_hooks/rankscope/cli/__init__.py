"""The commands of `rankscope`. Training processes do not import this package."""
