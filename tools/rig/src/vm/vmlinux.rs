//! The ELF kernel inside a `vmlinuz`: QEMU enters it directly, which saves the guest its own
//! decompression (5.5 s to 3.0 s until RDMA works, under TCG).
//!
//! As the kernel's `scripts/extract-vmlinux`: wherever a compressor's magic number stands, try to
//! decompress, and take what comes out if it is an ELF file. What follows the compressed part makes
//! decompressors complain, so their exit status says nothing.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

/// First bytes of an ELF file.
pub const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Decompressors: magic number, program and its arguments.
const FORMATS: &[(&[u8], &[&str])] = &[
    (b"\xfd7zXZ\0", &["xz", "-dc"]),
    (b"\x28\xb5\x2f\xfd", &["zstd", "-dqc"]),
    (b"\x1f\x8b\x08", &["gzip", "-dqc"]),
    (b"\x02\x21\x4c\x18", &["lz4", "-dqc"]),
    (b"BZh", &["bzip2", "-dqc"]),
    (b"\x5d\0\0\0", &["lzma", "-dc"]),
    (b"\x89LZO\0\r\n", &["lzop", "-dqc"]),
];

/// Places where something compressed may begin, first to last, with what decompresses it.
#[must_use]
pub fn candidates(image: &[u8]) -> Vec<(usize, &'static [&'static str])> {
    let mut found: Vec<_> = FORMATS
        .iter()
        .flat_map(|(magic, program)| {
            image
                .windows(magic.len())
                .enumerate()
                .filter(move |(_, window)| window == magic)
                .map(move |(at, _)| (at, *program))
        })
        .collect();
    found.sort_by_key(|(at, _)| *at);
    found
}

/// What a decompressor makes of `data`; empty if it is not installed or makes nothing of it.
/// Stops it as soon as `keep_on` rejects the beginning of what comes out.
fn decompress_while(program: &[&str], data: &[u8], keep_on: fn(&[u8]) -> bool) -> Vec<u8> {
    let Some((name, args)) = program.split_first() else {
        return Vec::new();
    };
    let Ok(mut child) = Command::new(name)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
    else {
        return Vec::new();
    };
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let mut output = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if let Some(mut stdin) = stdin {
                // It stops reading where its part ends; what it wrote counts.
                let _ = stdin.write_all(data);
            }
        });
        if let Some(mut stdout) = stdout {
            let _ = stdout.by_ref().take(64).read_to_end(&mut output);
            if keep_on(&output) {
                let _ = stdout.read_to_end(&mut output);
            } else {
                let _ = child.kill();
            }
        }
    });
    let _ = child.wait();
    output
}

/// The kernel as an ELF file, or `None` if there is none inside (or its decompressor is not
/// installed): QEMU can start the image as it is, only more slowly.
#[must_use]
pub fn extract(image: &[u8]) -> Option<Vec<u8>> {
    if image.starts_with(ELF_MAGIC) {
        return Some(image.to_vec());
    }
    let is_elf = |output: &[u8]| output.starts_with(ELF_MAGIC);
    candidates(image).into_iter().find_map(|(at, program)| {
        let output = decompress_while(program, &image[at..], is_elf);
        is_elf(&output).then_some(output)
    })
}

/// A file that may be compressed, by its magic number, decompressed.
#[must_use]
pub fn plain(data: Vec<u8>) -> Vec<u8> {
    match FORMATS.iter().find(|(magic, _)| data.starts_with(magic)) {
        Some((_, program)) => decompress_while(program, &data, |_| true),
        None => data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(data).expect("a Vec takes all");
        packed.finish().expect("a Vec takes all")
    }

    #[test]
    fn the_kernel_is_found_behind_false_magic_and_before_garbage() {
        let kernel: Vec<u8> = [ELF_MAGIC, &[7; 100_000]].concat();
        let image = [
            b"MZ header \x1f\x8b\x08 not really ".as_slice(),
            &gzip(b"something else"),
            &gzip(&kernel),
            b"signature",
        ]
        .concat();
        assert_eq!(extract(&image), Some(kernel.clone()));
        assert_eq!(extract(&kernel), Some(kernel.clone()), "it is one already");
        assert_eq!(extract(b"MZ and nothing more"), None);
        assert_eq!(plain(gzip(&kernel)), kernel);
        assert_eq!(plain(kernel.clone()), kernel);
    }

    #[test]
    fn candidates_come_in_order_of_place() {
        let places = candidates(b"..\x1f\x8b\x08..\xfd7zXZ\0..\x1f\x8b\x08");
        assert_eq!(
            places.iter().map(|c| (c.0, c.1[0])).collect::<Vec<_>>(),
            [(2, "gzip"), (7, "xz"), (15, "gzip")]
        );
    }
}
