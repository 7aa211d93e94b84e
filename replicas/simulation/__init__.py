"""Engines for simulators and fault plans: virtual time, modelled devices, injected faults."""
