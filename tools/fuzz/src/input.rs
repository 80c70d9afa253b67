//! Bytes, taken from the front. Beyond the end there are zeros.

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of them.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// There are none any more.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// So many, or as many as there are.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(count.min(self.0.len()));
        self.0 = tail;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two of them, little-endian.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Eight of them.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// As many as the two bytes before them say.
    pub fn packet(&mut self) -> &'a [u8] {
        let length = self.short();
        self.take(usize::from(length))
    }
}

/// What [`Input::packet`] reads.
pub(crate) fn put_packet(bytes: &mut Vec<u8>, packet: &[u8]) {
    bytes.extend((packet.len() as u16).to_le_bytes());
    bytes.extend(packet);
}
