"""The XDP engine: packets are added up in the kernel's data path."""
