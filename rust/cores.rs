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

/// What Linux says of the CPUs `allowed`, its root directory being `root`; None where it says nothing.
fn describe(root: &Path, allowed: &[usize]) -> Option<Vec<Cpu>> {
    let read = |path: &str| std::fs::read_to_string(root.join("sys/devices").join(path)).ok();
    // Intel's CPUs with two kinds of cores list the efficient ones here.
    let efficient = read("cpu_atom/cpus").map_or(Vec::new(), |list| ids(&list));
    let cpu = |id: &usize| {
        let of_cpu = |name: &str| read(&format!("system/cpu/cpu{id}/{name}"));
        let core = ids(&of_cpu("topology/thread_siblings_list")?).into_iter().min()?;
        let capacity = of_cpu("cpu_capacity").and_then(|text| text.trim().parse().ok());
        let capacity = capacity.unwrap_or(if efficient.contains(id) { 512 } else { 1024 });
        Some(Cpu { id: *id, core, capacity })
    };
    allowed.iter().map(cpu).collect()
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

static MACHINE: LazyLock<Machine> = LazyLock::new(|| match describe(Path::new("/"), &allowed()) {
    Some(cpus) if !cpus.is_empty() => {
        let (fast, leaves_out) = fast_cpus(&cpus);
        Machine { n_fast: fast.len(), stay_on: leaves_out.then_some(fast) }
    }
    _ => Machine { n_fast: system::n_fast().unwrap_or_else(num_cpus::get_physical), stay_on: None },
});

/// Fast physical cores that this process may use, as far as its share of CPU time goes.
pub fn n_fast() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    MACHINE.n_fast.clamp(1, allowed)
}

/// The CPUs that the helpers in a team of `n_threads` should stay on; None where they may run anywhere.
pub fn stay_on(n_threads: usize) -> Option<&'static [usize]> {
    MACHINE.stay_on.as_deref().filter(|cpus| n_threads <= cpus.len())
}

pub use system::{allowed, keep_to};

#[cfg(target_os = "linux")]
mod system {
    const SIZE: usize = size_of::<libc::cpu_set_t>();

    /// The CPUs that the calling thread may use; none when that cannot be found out.
    pub fn allowed() -> Vec<usize> {
        // SAFETY: a set of bits, for which zeros are valid; the call writes no more than that, and the numbers are in it.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let known = libc::sched_getaffinity(0, SIZE, &mut set) == 0;
            (0..8 * SIZE).filter(|id| known && libc::CPU_ISSET(*id, &set)).collect()
        }
    }

    /// Keeps the calling thread to those of `cpus` that it may use, if there are any and the system lets it.
    pub fn keep_to(cpus: &[usize]) {
        // SAFETY: as above.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let kept: Vec<usize> = allowed().into_iter().filter(|id| cpus.contains(id)).collect();
            if !kept.is_empty() {
                kept.iter().for_each(|id| libc::CPU_SET(*id, &mut set));
                libc::sched_setaffinity(0, SIZE, &set);
            }
        }
    }

    /// Known from the description, if at all.
    pub fn n_fast() -> Option<usize> {
        None
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    /// Other systems do not say.
    pub fn allowed() -> Vec<usize> {
        Vec::new()
    }

    /// Other systems have no such call, or do it by themselves: macOS runs busy threads on its fast cores as long as there
    /// are enough of these.
    pub fn keep_to(_cpus: &[usize]) {}

    #[cfg(target_os = "macos")]
    pub fn n_fast() -> Option<usize> {
        let (mut n, mut size) = (0_i32, size_of::<i32>());
        // SAFETY: the name ends with a zero, and the value has room for what is asked for.
        let failed = unsafe {
            let name = c"hw.perflevel0.physicalcpu".as_ptr();
            libc::sysctlbyname(name, (&raw mut n).cast(), &mut size, std::ptr::null_mut(), 0)
        };
        usize::try_from(n).ok().filter(|n| failed == 0 && *n > 0)
    }

    #[cfg(not(target_os = "macos"))]
    pub fn n_fast() -> Option<usize> {
        None
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

    /// A root directory with files below sys/devices of these names and texts.
    fn root(name: &str, files: &[(&str, &str)]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("larql-cores-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join("sys/devices").join(path);
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
                ("system/cpu/cpu0/cpu_capacity", "446\n"),
                ("system/cpu/cpu0/topology/thread_siblings_list", "0\n"),
                ("system/cpu/cpu2/cpu_capacity", "1024\n"),
                ("system/cpu/cpu2/topology/thread_siblings_list", "2\n"),
                ("system/cpu/cpu3/cpu_capacity", "1024\n"),
                ("system/cpu/cpu3/topology/thread_siblings_list", "3\n"),
            ],
        );
        let want = [(0, 0, 446), (2, 2, 1024), (3, 3, 1024)].map(|(id, core, capacity)| Cpu { id, core, capacity });
        assert_eq!(describe(&big_little, &[0, 2, 3]).unwrap(), want);
        assert_eq!(describe(&big_little, &[0, 1]), None, "nothing is known of CPU 1");
        let hybrid = root(
            "hybrid",
            &[
                ("cpu_atom/cpus", "4-7\n"),
                ("system/cpu/cpu0/topology/thread_siblings_list", "0-1\n"),
                ("system/cpu/cpu1/topology/thread_siblings_list", "0-1\n"),
                ("system/cpu/cpu2/topology/thread_siblings_list", "2,3\n"),
                ("system/cpu/cpu3/topology/thread_siblings_list", "2,3\n"),
                ("system/cpu/cpu4/topology/thread_siblings_list", "4\n"),
            ],
        );
        assert_eq!(fast_cpus(&describe(&hybrid, &[0, 1, 2, 3, 4]).unwrap()), (vec![0, 2], true));
        [big_little, hybrid].iter().for_each(|root| std::fs::remove_dir_all(root).unwrap());
    }
}
