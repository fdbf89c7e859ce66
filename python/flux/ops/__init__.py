"""One file per operator: schema, argument checks, fake, reference, CPU path, CUDA path, public function."""
