//! Files mapped for reading, and what happens when one changes although it is in use.
//!
//! Pages of a mapped file that another program cuts short are gone, and reading them ends the process (SIGBUS on Unix).
//! Here they turn into zeros instead, and whoever has computed with a file asks `MappedFile::check` before the result is
//! used. It also notices a file that was written to. One that was replaced by another of its name is no problem: the
//! map goes on showing the old content.

use crate::error::{Result, model_error};
use memmap2::Mmap;
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A whole file, mapped.
#[derive(Debug)]
pub struct MappedFile {
    // Dropped in this order: a guard may outlive nothing that it guards.
    guard: guard::Guard,
    map: Mmap,
    file: File,
    path: PathBuf,
    stamp: (u64, Option<SystemTime>),
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// `Error::Model`, starting with the path, when it is not a regular file or cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let unreadable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => model_error!("{shown}: there is no such file"),
            _ => model_error!("{shown}: cannot be read: {error}"),
        };
        // Asked before opening, because opening a FIFO waits for its writer.
        let kind = fs::metadata(path).map_err(unreadable)?;
        if kind.is_dir() {
            return Err(model_error!("{shown}: is a directory where a file is needed"));
        }
        if !kind.is_file() {
            return Err(model_error!("{shown}: is not a regular file"));
        }
        let file = File::open(path).map_err(unreadable)?;
        let stamp = stamp(&file.metadata().map_err(unreadable)?);
        // SAFETY: the map is only read, and never as anything that has invalid values. Should another program change the
        // file, its pages are other bytes or, by the guard, zeros, and `check` tells.
        let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage); // only advice: a kernel without huge pages refuses it
        Ok(Self { guard: guard::Guard::new(&map), map, file, path: path.to_owned(), stamp })
    }

    /// Whether what was read since `open` is what the file had then.
    ///
    /// # Errors
    /// `Error::Model` when the file has changed.
    pub fn check(&self) -> Result<()> {
        let same = self.file.metadata().is_ok_and(|now| stamp(&now) == self.stamp);
        if same && !self.guard.has_lost_pages() {
            return Ok(());
        }
        Err(model_error!("{}: the file has changed while it was in use; open the model again", self.path.display()))
    }
}

impl std::ops::Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

fn stamp(facts: &Metadata) -> (u64, Option<SystemTime>) {
    (facts.len(), facts.modified().ok())
}

#[cfg(unix)]
mod guard {
    //! Zeros for pages that are gone: a handler of SIGBUS that knows the maps.

    use std::ffi::{c_int, c_void};
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

    /// A map's addresses, where the handler finds them. Slots are never freed, but used again.
    struct Slot {
        taken: AtomicBool,
        start: AtomicUsize,
        /// 0 while there is no map.
        end: AtomicUsize,
        lost: AtomicBool,
        next: Option<&'static Slot>,
    }

    static FIRST: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
    static INSTALLED: OnceLock<Before> = OnceLock::new();

    /// What was there before the handler.
    struct Before {
        page_size: usize,
        action: libc::sigaction,
    }

    /// Guards one map.
    #[derive(Debug)]
    pub struct Guard(&'static Slot);

    impl Guard {
        pub fn new(map: &[u8]) -> Self {
            INSTALLED.get_or_init(install);
            let slot = slots().find(|slot| !slot.taken.swap(true, Ordering::AcqRel)).unwrap_or_else(add_slot);
            let addresses = map.as_ptr_range();
            slot.lost.store(false, Ordering::Relaxed);
            slot.start.store(addresses.start as usize, Ordering::Relaxed);
            slot.end.store(addresses.end as usize, Ordering::Release);
            Self(slot)
        }

        pub fn has_lost_pages(&self) -> bool {
            self.0.lost.load(Ordering::Acquire)
        }
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.end.store(0, Ordering::Release);
            self.0.taken.store(false, Ordering::Release);
        }
    }

    impl std::fmt::Debug for Slot {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Slot").field("lost", &self.lost).finish_non_exhaustive()
        }
    }

    fn first() -> Option<&'static Slot> {
        // SAFETY: what FIRST points to comes from `add_slot`, which never frees it.
        unsafe { FIRST.load(Ordering::Acquire).as_ref() }
    }

    fn slots() -> impl Iterator<Item = &'static Slot> {
        std::iter::successors(first(), |slot| slot.next)
    }

    /// A new slot, taken, at the front of the list.
    fn add_slot() -> &'static Slot {
        let slot = Box::leak(Box::new(Slot {
            taken: AtomicBool::new(true),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            next: None,
        }));
        loop {
            slot.next = first();
            let expected = slot.next.map_or(ptr::null_mut(), |slot| ptr::from_ref(slot).cast_mut());
            if FIRST.compare_exchange(expected, slot, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return slot;
            }
        }
    }

    fn install() -> Before {
        // SAFETY: plain calls of the system with valid pointers; the handler makes only calls that a handler may make.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before);
            let page_size = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(1 << 16);
            Before { page_size, action: before }
        }
    }

    /// Maps zeros from the page that is gone to the end of its map, so that the access succeeds. An access that is not
    /// to a map of ours happens again with what handled it before.
    extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
        let Some(before) = INSTALLED.get() else { return };
        // SAFETY: the system gives a valid siginfo_t, and for this signal it has an address.
        let address = unsafe { (*info).si_addr() } as usize;
        let holds =
            |slot: &&Slot| address < slot.end.load(Ordering::Acquire) && address >= slot.start.load(Ordering::Relaxed);
        if let Some(slot) = slots().find(holds) {
            let page = address - address % before.page_size;
            let length = slot.end.load(Ordering::Acquire).saturating_sub(page);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED;
            // SAFETY: the pages belong to a map that is only read and that lives while it is read.
            let zeros = unsafe { libc::mmap(page as *mut c_void, length, libc::PROT_READ, flags, -1, 0) };
            if zeros != libc::MAP_FAILED {
                slot.lost.store(true, Ordering::Release);
                return;
            }
        }
        // SAFETY: what was valid before is valid again.
        unsafe { libc::sigaction(signal, &raw const before.action, ptr::null_mut()) };
    }
}

#[cfg(not(unix))]
mod guard {
    //! Where a mapped file cannot be cut short, there is nothing to guard.

    #[derive(Debug)]
    pub struct Guard;

    impl Guard {
        pub fn new(_map: &[u8]) -> Self {
            Self
        }

        pub fn has_lost_pages(&self) -> bool {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    /// A file of `len` bytes 7 that is removed in the end.
    struct Sample(PathBuf);

    impl Sample {
        fn new(name: &str, len: usize) -> Self {
            let path = std::env::temp_dir().join(format!("larql-mapped-{}-{name}", std::process::id()));
            fs::write(&path, vec![7; len]).unwrap();
            Self(path)
        }

        fn cut(&self, len: u64) {
            OpenOptions::new().write(true).open(&self.0).unwrap().set_len(len).unwrap();
        }
    }

    impl Drop for Sample {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn a_file_that_stays_is_what_it_was() {
        let sample = Sample::new("stays", 100_000);
        let file = MappedFile::open(&sample.0).unwrap();
        assert!(file.len() == 100_000 && file.iter().all(|byte| *byte == 7));
        file.check().unwrap();
    }

    #[test]
    fn a_file_that_another_replaces_is_no_problem() {
        let (sample, other) = (Sample::new("replaced", 100_000), Sample::new("other", 10));
        let file = MappedFile::open(&sample.0).unwrap();
        fs::rename(&other.0, &sample.0).unwrap();
        assert!(file.iter().all(|byte| *byte == 7));
        file.check().unwrap();
    }

    #[test]
    #[cfg(unix)]
    fn pages_that_are_gone_are_zeros_and_said() {
        for _ in 0..3 {
            let (sample, whole) = (Sample::new("cut", 1 << 20), Sample::new("whole", 1 << 20));
            let (file, other) = (MappedFile::open(&sample.0).unwrap(), MappedFile::open(&whole.0).unwrap());
            sample.cut(1 << 18);
            assert_eq!(file.iter().filter(|byte| **byte == 7).count(), 1 << 18);
            sample.cut(1 << 20);
            assert!(file.check().unwrap_err().to_string().contains("has changed while it was in use"));
            other.check().unwrap();
        }
    }

    #[test]
    fn a_file_that_is_written_to_is_noticed() {
        let sample = Sample::new("written", 100_000);
        let file = MappedFile::open(&sample.0).unwrap();
        let later = SystemTime::now() + std::time::Duration::from_secs(9);
        OpenOptions::new().write(true).open(&sample.0).unwrap().set_modified(later).unwrap();
        assert!(file.check().is_err());
    }
}
