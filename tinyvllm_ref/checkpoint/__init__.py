"""From files on disk to named tensors: the safetensors reader, the plan of the weights, the download."""
