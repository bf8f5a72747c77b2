"""The shared mechanisms that techniques apply through, one file each; all run on CUDA and on CPU."""
