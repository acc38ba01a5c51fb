"""The XDP engine: packets of data are added up inside the kernel, before its network stack sees them."""
