//! A thread between a controller's mailbox and a service. The controller puts a question in and
//! goes on; this thread waits for the question, and for the answer.
//!
//! It is there for a frontend that embeds H-MAS; none of the programs here starts one yet. The
//! simulator asks while virtual time stands still ([`Client::ask_blocking`]), and the engine takes
//! no decisions from services outside, since their answers are in no record and could not be
//! replayed.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use laxity_requests::hmas::meta::external::Mailbox;
use tokio::sync::oneshot;

use crate::client::Client;

/// Carries until it is dropped; what is under way is given up then.
#[derive(Debug)]
pub struct Carrier {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Carrier {
    /// Begins to carry.
    ///
    /// # Errors
    /// If there can be no more threads or file descriptors.
    pub fn start(client: Arc<Client>, mailbox: Mailbox) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let carry = async move {
            loop {
                let question = poll_fn(|context| mailbox.poll_take(context)).await;
                let came = client.ask(&question).await;
                // A question that was asked meanwhile is in the mailbox; the controller knows by
                // its number that this answer is not to that one.
                mailbox.answer(question.number, came.map_err(|failure| failure.to_string()));
            }
        };
        let thread = std::thread::Builder::new()
            .name("decisions".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        _ = stopped => {}
                        () = carry => {}
                    }
                });
                // A name that is being resolved cannot be given up: nobody waits for it.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; if it did, there is nobody left to tell.
            let _ = thread.join();
        }
    }
}
