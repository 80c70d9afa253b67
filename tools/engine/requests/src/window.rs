//! The latest values, in order of size.

use std::collections::VecDeque;

#[derive(Clone, Debug)]
pub(crate) struct Window<T> {
    recent: VecDeque<T>,
    sorted: Vec<T>,
}

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self { recent: VecDeque::new(), sorted: Vec::new() }
    }
}

impl<T: Copy + Ord> Window<T> {
    /// Adds a value. Of more than `most` values the oldest leaves.
    pub(crate) fn push(&mut self, value: T, most: usize) {
        if self.recent.len() >= most
            && let Some(oldest) = self.recent.pop_front()
            && let Ok(at) = self.sorted.binary_search(&oldest)
        {
            self.sorted.remove(at);
        }
        self.recent.push_back(value);
        let at = self.sorted.partition_point(|other| *other < value);
        self.sorted.insert(at, value);
    }

    pub(crate) fn sorted(&self) -> &[T] {
        &self.sorted
    }
}
