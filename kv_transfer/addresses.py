"""Which addresses an engine may listen on.

Pure; owns no state.
"""

import ipaddress

from kv_transfer.errors import AddressError


def check_listen_host(host: str, *, has_secrets: bool) -> None:
    """Refuse to listen on more than one interface, or to others' hosts without a secret.

    Args:
        host: The host of an address to bind, as a number; IPv6 with or without brackets.
        has_secrets: Whether whoever connects has to prove that it holds a deployment's secret.

    Raises:
        AddressError: It is a wildcard or a name, or beyond loopback without a secret.
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise AddressError(
            f"cannot listen on {host!r}: give one address of this host as a number, for one "
            "127.0.0.1"
        ) from None
    mapped = getattr(address, "ipv4_mapped", None)
    address = address if mapped is None else mapped
    if address.is_unspecified:
        raise AddressError(
            f"cannot listen on {host}: that is every network of this host, and no address that "
            "others can be told; give the one address that the engines reach each other on"
        )
    if not has_secrets and not address.is_loopback:
        raise AddressError(
            f"cannot listen on {host} without a secret: anybody could speak; set keys, or listen "
            "on 127.0.0.1"
        )
