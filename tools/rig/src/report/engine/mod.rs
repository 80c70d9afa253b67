//! What the lab found with the real engine: numbers ([`measure`]), a table for the terminal, a
//! page.

pub mod html;
pub mod measure;
pub mod table;

pub use html::html;
pub use measure::{EngineReport, report};
pub use table::table;
