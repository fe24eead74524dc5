//! Which CPUs a forward runs on: one of each physical core, and where cores are of several kinds, of the fast ones.
//!
//! Each operation of a forward ends with its slowest thread, so slow cores take more than they give: the public LARQL
//! lost a factor of 3.5 to the efficiency cores of an M3 Max.

use std::path::Path;
use std::sync::LazyLock;

/// A logical CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// The system's number.
    pub id: usize,
    /// The smallest number among those of the same physical core.
    pub core: usize,
    /// Work that it does in a time, on any scale.
    pub capacity: usize,
}

/// A core is fast from this percentage of the fastest core's capacity on. By Linux's device trees, the efficiency cores
/// of Apple's M1 and M2 have 45 and 51 % (714 and 756 of 1024 at equal frequencies, times the frequencies).
const FAST_PERCENT: usize = 60;

/// The CPUs to run on, when a process may use `cpus`: of each fast core the first one. With them, whether slow cores are
/// left out.
pub fn fast_cpus(cpus: &[Cpu]) -> (Vec<usize>, bool) {
    let mut cores: Vec<Cpu> = Vec::new();
    for cpu in cpus {
        if !cores.iter().any(|known| known.core == cpu.core) {
            cores.push(*cpu);
        }
    }
    let best = cores.iter().map(|cpu| cpu.capacity).max().unwrap_or(0);
    let is_fast = |cpu: &&Cpu| cpu.capacity * 100 >= best * FAST_PERCENT;
    let fast: Vec<usize> = cores.iter().filter(is_fast).map(|cpu| cpu.id).collect();
    let leaves_out = fast.len() < cores.len();
    (fast, leaves_out)
}

/// What Linux says of the CPUs that this process may use, its root directory being `root`; None where it says nothing.
fn describe(root: &Path) -> Option<Vec<Cpu>> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let status = read("proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    // Intel's CPUs with two kinds of cores list the efficient ones here.
    let efficient = read("sys/devices/cpu_atom/cpus").map_or(Vec::new(), |list| ids(&list));
    let cpu = |id: usize| {
        let of_cpu = |name: &str| read(&format!("sys/devices/system/cpu/cpu{id}/{name}"));
        let siblings = of_cpu("topology/thread_siblings_list").map_or(Vec::new(), |list| ids(&list));
        let capacity = of_cpu("cpu_capacity").and_then(|text| text.trim().parse().ok());
        let capacity = capacity.unwrap_or(if efficient.contains(&id) { 512 } else { 1024 });
        Cpu { id, core: siblings.into_iter().min().unwrap_or(id), capacity }
    };
    Some(ids(allowed).into_iter().map(cpu).collect())
}

/// The numbers of a list as Linux writes it: `0-3,8`.
fn ids(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// What is known of this machine.
struct Machine {
    /// Fast physical cores that this process may use.
    n_fast: usize,
    /// Their CPUs, where there are slow ones to keep away from.
    stay_on: Option<Vec<usize>>,
}

static MACHINE: LazyLock<Machine> = LazyLock::new(|| match describe(Path::new("/")) {
    Some(cpus) if !cpus.is_empty() => {
        let (fast, leaves_out) = fast_cpus(&cpus);
        Machine { n_fast: fast.len(), stay_on: leaves_out.then_some(fast) }
    }
    _ => Machine { n_fast: system::n_fast(), stay_on: None },
});

/// Fast physical cores that this process may use, as far as its share of CPU time goes.
pub fn n_fast() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    MACHINE.n_fast.clamp(1, allowed)
}

/// The CPUs that a team of `n_threads` should stay on; None where it may run anywhere.
pub fn stay_on(n_threads: usize) -> Option<&'static [usize]> {
    MACHINE.stay_on.as_deref().filter(|cpus| n_threads <= cpus.len())
}

/// Keeps the calling thread on some CPUs until it is dropped, as far as the system lets it.
pub struct Stay {
    #[cfg(target_os = "linux")]
    before: Option<libc::cpu_set_t>,
}

impl Stay {
    /// As long as the thread lives.
    pub fn for_good(self) {
        std::mem::forget(self);
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::Stay;

    impl Stay {
        /// On `cpus`, or with None wherever the thread may run already.
        pub fn new(cpus: Option<&[usize]>) -> Self {
            let Some(cpus) = cpus else { return Self { before: None } };
            // SAFETY: sets of bits, for which zeros are valid; both calls concern this thread and stay within the sets.
            unsafe {
                let (mut before, mut wanted): (libc::cpu_set_t, libc::cpu_set_t) = std::mem::zeroed();
                let size = size_of::<libc::cpu_set_t>();
                let bits = 8 * size;
                cpus.iter().filter(|id| **id < bits).for_each(|id| libc::CPU_SET(*id, &mut wanted));
                let known = libc::sched_getaffinity(0, size, &mut before) == 0;
                let stays = known && libc::sched_setaffinity(0, size, &wanted) == 0;
                Self { before: stays.then_some(before) }
            }
        }
    }

    impl Drop for Stay {
        fn drop(&mut self) {
            if let Some(before) = &self.before {
                // SAFETY: as above.
                unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), before) };
            }
        }
    }

    /// Where Linux hides its description.
    pub fn n_fast() -> usize {
        num_cpus::get_physical()
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::Stay;

    impl Stay {
        /// There is no such call here.
        pub fn new(_cpus: Option<&[usize]>) -> Self {
            Self {}
        }
    }

    /// macOS runs busy threads on its fast cores as long as there are enough of these.
    #[cfg(target_os = "macos")]
    pub fn n_fast() -> usize {
        let (mut n, mut size) = (0_i32, size_of::<i32>());
        // SAFETY: the name ends with a zero, and the value has room for what is asked for.
        let failed = unsafe {
            let name = c"hw.perflevel0.physicalcpu".as_ptr();
            libc::sysctlbyname(name, (&raw mut n).cast(), &mut size, std::ptr::null_mut(), 0)
        };
        if failed == 0 && n > 0 { n as usize } else { num_cpus::get_physical() }
    }

    #[cfg(not(target_os = "macos"))]
    pub fn n_fast() -> usize {
        num_cpus::get_physical()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPUs from (capacity, physical core), numbered from 0.
    fn cpus(described: &[(usize, usize)]) -> Vec<Cpu> {
        described
            .iter()
            .enumerate()
            .map(|(id, (capacity, core))| Cpu { id, core: *core, capacity: *capacity })
            .collect()
    }

    #[test]
    fn fast_cores_alone_are_chosen() {
        let alike = cpus(&[(1024, 0), (1024, 1), (1024, 0), (1024, 1)]);
        assert_eq!(fast_cpus(&alike), (vec![0, 1], false), "two threads of each core");
        let big_little = cpus(&[(446, 0), (446, 1), (446, 2), (446, 3), (1024, 4), (1024, 5)]);
        assert_eq!(fast_cpus(&big_little), (vec![4, 5], true));
        let m2 = cpus(&[(523, 0), (523, 1), (1024, 2), (1024, 3)]);
        assert_eq!(fast_cpus(&m2), (vec![2, 3], true));
        let phone = cpus(&[(280, 0), (280, 1), (830, 2), (830, 3), (1024, 4)]);
        assert_eq!(fast_cpus(&phone), (vec![2, 3, 4], true), "the middle ones are fast enough");
        let only_little = cpus(&[(446, 0), (446, 1)]);
        assert_eq!(fast_cpus(&only_little), (vec![0, 1], false), "what the process may use counts");
        assert_eq!(fast_cpus(&[]), (vec![], false));
    }

    /// A root directory with files of these names and texts.
    fn root(name: &str, files: &[(&str, &str)]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("larql-cores-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn linux_describes_its_cpus() {
        let big_little = root(
            "big-little",
            &[
                ("proc/self/status", "Name:\tx\nCpus_allowed:\td\nCpus_allowed_list:\t0,2-3\n"),
                ("sys/devices/system/cpu/cpu0/cpu_capacity", "446\n"),
                ("sys/devices/system/cpu/cpu2/cpu_capacity", "1024\n"),
                ("sys/devices/system/cpu/cpu3/cpu_capacity", "1024\n"),
                ("sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "3\n"),
            ],
        );
        let want = [(0, 0, 446), (2, 2, 1024), (3, 3, 1024)].map(|(id, core, capacity)| Cpu { id, core, capacity });
        assert_eq!(describe(&big_little).unwrap(), want);
        let hybrid = root(
            "hybrid",
            &[
                ("proc/self/status", "Cpus_allowed_list:\t0-4\n"),
                ("sys/devices/cpu_atom/cpus", "4-7\n"),
                ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1\n"),
                ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n"),
                ("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "2,3\n"),
                ("sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "2,3\n"),
            ],
        );
        assert_eq!(fast_cpus(&describe(&hybrid).unwrap()), (vec![0, 2], true));
        assert_eq!(describe(&hybrid.join("nothing")), None);
        [big_little, hybrid].iter().for_each(|root| std::fs::remove_dir_all(root).unwrap());
    }

    #[test]
    fn a_thread_stays_and_returns() {
        let allowed = || std::thread::available_parallelism().unwrap().get();
        let (before, cpus) = (allowed(), describe(Path::new("/")));
        let Some([first, ..]) = cpus.as_deref() else { return }; // not Linux
        let stay = Stay::new(Some(&[first.id]));
        assert_eq!(allowed(), 1);
        drop(stay);
        assert_eq!(allowed(), before);
        drop(Stay::new(None));
    }
}
