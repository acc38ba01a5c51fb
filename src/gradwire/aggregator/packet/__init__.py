"""The packet that workers and the aggregator exchange: packet_format.h for C and C++, packet_format.py for Python."""
