"""CUDA C++ on the GPU at hand: compiled by NVRTC, loaded and launched by the driver. It knows nothing of gradients."""
