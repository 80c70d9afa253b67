//! Runs every target over its seeds and thousands of mutations of them. `make fuzz` does the same
//! for longer and guided by coverage.

const MUTATIONS: usize = 1000;

struct Noise(u64);

impl Noise {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }

    /// Returns a copy of `seed` with a few changes of the kinds that a fuzzer makes.
    fn mutate(&mut self, seeds: &[Vec<u8>], seed: &[u8]) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=self.next(4) {
            let at = self.next(bytes.len());
            match self.next(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.next(8),
                1 if at < bytes.len() => bytes[at] = self.next(256) as u8,
                2 => bytes.insert(at, self.next(256) as u8),
                3 if at < bytes.len() => drop(bytes.remove(at)),
                4 => bytes.truncate(at),
                _ => {
                    let other = &seeds[self.next(seeds.len())];
                    let from = self.next(other.len());
                    bytes.splice(at..at, other[from..].iter().copied());
                    bytes.truncate(4096);
                }
            }
        }
        bytes
    }
}

fn all(target: &str, run: fn(&[u8])) {
    let seeds = laxity_fuzz::seeds();
    let seeds = seeds.into_iter().find(|(name, _)| *name == target);
    let (_, seeds) = seeds.expect("it has seeds");
    run(&[]);
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    for seed in &seeds {
        run(seed);
        for _ in 0..MUTATIONS {
            run(&noise.mutate(&seeds, seed));
        }
    }
}

macro_rules! targets {
    ($($target:ident)*) => {$(
        #[test]
        fn $target() {
            all(stringify!($target), laxity_fuzz::$target::run);
        }
    )*};
}

targets! { wire records handshake control http texts hints }

#[test]
fn registration() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    // The limit isn't exact, because other threads of the test process also open descriptors.
    let before = descriptors();
    all("registration", laxity_fuzz::registration::run);
    assert!(descriptors() < before + 50, "descriptors are not left open");
}
