"""Model families, one module each: how to read a configuration, and what each layer is.

See docs/adding-a-model.md. Imports no torch, so that any module may inspect a model folder.
"""
