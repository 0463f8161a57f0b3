"""What the Mooncake store needs of the machine; a module of its own, to be asked where nothing is installed."""

PACKAGE = "mooncake-transfer-engine-non-cuda"
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
"""Shared libraries of the system that the package needs, and Debian's package of each."""
