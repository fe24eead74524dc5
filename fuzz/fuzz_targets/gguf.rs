//! Any bytes either parse as a GGUF file, whose tensors then fit into it, or give an error of one line.
//!
//! Run with `cargo fuzz run gguf` on a nightly toolchain, or on a stable one with RUSTC_BOOTSTRAP=1. Files of a few
//! kilobytes in fuzz/corpus/gguf, such as those that tests/test_gguf.py writes, are a good start.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match larql::gguf::parse(bytes) {
        Ok(header) => {
            let n_data_bytes: usize = header.tensors.iter().map(|tensor| tensor.n_bytes).sum();
            assert!(n_data_bytes < bytes.len());
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});
