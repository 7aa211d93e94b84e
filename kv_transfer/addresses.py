"""Check of the addresses that an engine may listen on.

Pure; owns no state.
"""

import ipaddress

from kv_transfer.errors import AddressError


def check_listen_host(host: str, *, has_secrets: bool) -> None:
    """Refuse to listen on more than one interface, or to other hosts without a secret.

    Args:
        host: Host part of the address to bind, as a number; IPv6 with or without brackets.
        has_secrets: Whether a client must prove that it holds a secret of the deployment.

    Raises:
        AddressError: It is a wildcard or a name, or beyond loopback without a secret.
    """
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise AddressError(
            f"cannot listen on {host!r}: this is no IP address; give one numeric address of this "
            "host, such as 127.0.0.1"
        ) from None
    # A wildcard written as ::ffff:0.0.0.0 is a wildcard.
    mapped = getattr(address, "ipv4_mapped", None)
    address = address if mapped is None else mapped
    if address.is_unspecified:
        raise AddressError(
            f"cannot listen on {host}: it stands for every interface, and other engines cannot "
            "connect to it; give the one address on which the engines reach each other"
        )
    if not has_secrets and not address.is_loopback:
        raise AddressError(
            f"cannot listen on {host} without a secret: any host could connect; set key_file, or "
            "listen on 127.0.0.1"
        )
