"""Tenstorrent hardware as a host knows it without ttnn: boards, meshes, tt-smi, ttnn's package."""
