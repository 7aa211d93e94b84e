"""Generator classes written for other engines on Tenstorrent hardware, behind our protocol."""
