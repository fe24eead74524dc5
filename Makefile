# Short names for the commands of tools/dev.py, which works without make, too.

.PHONY: help demo test lint format wheel test-arm wheel-arm fuzz

help:    ## list these targets
	@sed -n 's/^\([a-z-]*\): *## /make \1\t/p' $(MAKEFILE_LIST)

demo:    ## set up and print what Gemma 3 270M makes of a few words
test:    ## set up and run every check and every test
lint:    ## run the checks alone: format, lints, types, the extension's stub
format:  ## format the Rust and the Python code
wheel:   ## build the wheel that would be published, into target/dist
test-arm:   ## run the Rust tests and two models on emulated AArch64 CPUs
wheel-arm:  ## build the wheel for AArch64 on another machine
fuzz:    ## search for GGUF headers that break the reader, for a minute

demo test lint format wheel test-arm wheel-arm fuzz:
	@python3 tools/dev.py $@
