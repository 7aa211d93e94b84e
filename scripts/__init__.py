"""Programs run by hand from the repository root (`python -m scripts.<name>`); never packaged."""
