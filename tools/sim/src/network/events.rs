//! The next end of a transfer in each band: an indexed heap with at most one event per band.

use super::transfer::NONE;

const ARITY: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Event {
    at_ns: u64,
    band: u32,
}

/// The heap of events. Events of the same time are in no particular order.
#[derive(Debug, Default)]
pub(super) struct Events {
    heap: Vec<Event>,
    /// Position in the heap by band, or [`NONE`].
    places: Vec<u32>,
}

impl Events {
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        self.heap.first().map(|event| (event.at_ns, event.band))
    }

    pub(super) fn set(&mut self, band: u32, at_ns: Option<u64>) {
        if band as usize >= self.places.len() {
            self.places.resize(band as usize + 1, NONE);
        }
        let place = self.places[band as usize];
        match at_ns {
            Some(at_ns) if place == NONE => {
                self.heap.push(Event { at_ns, band });
                self.rise(self.heap.len() - 1);
            }
            Some(at_ns) => {
                let event = &mut self.heap[place as usize];
                let before_ns = std::mem::replace(&mut event.at_ns, at_ns);
                if at_ns < before_ns {
                    self.rise(place as usize);
                } else if at_ns > before_ns {
                    self.sink(place as usize);
                }
            }
            None if place == NONE => {}
            None => {
                self.places[band as usize] = NONE;
                let place = place as usize;
                let gone = self.heap.swap_remove(place);
                if let Some(moved) = self.heap.get(place) {
                    if moved.at_ns < gone.at_ns {
                        self.rise(place);
                    } else {
                        self.sink(place);
                    }
                }
            }
        }
    }

    fn put(&mut self, place: usize, event: Event) {
        self.heap[place] = event;
        self.places[event.band as usize] = place as u32;
    }

    fn rise(&mut self, mut place: usize) {
        let event = self.heap[place];
        while place > 0 {
            let parent = (place - 1) / ARITY;
            if self.heap[parent].at_ns <= event.at_ns {
                break;
            }
            self.put(place, self.heap[parent]);
            place = parent;
        }
        self.put(place, event);
    }

    fn sink(&mut self, mut place: usize) {
        let event = self.heap[place];
        loop {
            let first = place * ARITY + 1;
            let Some(children) =
                self.heap.get(first..(first + ARITY).min(self.heap.len()).max(first))
            else {
                break;
            };
            let Some(least) = (0..children.len()).min_by_key(|&nth| children[nth].at_ns) else {
                break;
            };
            if children[least].at_ns >= event.at_ns {
                break;
            }
            self.put(place, self.heap[first + least]);
            place = first + least;
        }
        self.put(place, event);
    }
}
