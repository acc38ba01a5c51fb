"""How bytes get from rank to rank: process group, messages of uneven length, and the exchange thread."""
