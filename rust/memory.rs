//! Large memory for weights, in huge pages where the system has them: a core that streams through 4 KiB pages waits for
//! address translation, which cost a third of the read bandwidth where it was measured.

use crate::error::{Result, model_error};
use memmap2::MmapMut;

/// Anonymous memory, on a boundary of a page.
#[derive(Debug)]
pub struct Memory(MmapMut);

impl Memory {
    /// `len` bytes of zeros; at least one.
    ///
    /// # Errors
    /// `Error::Model` when there is not enough memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let map = MmapMut::map_anon(len).map_err(|e| model_error!("no memory for {len} bytes of weights: {e}"))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel without huge pages refuses it
        Ok(Self(map))
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
