//! Writes the seeds of every target: `seeds FOLDER` makes FOLDER/TARGET/NUMBER.

use std::fs;
use std::io::Error;
use std::path::Path;

fn main() -> Result<(), Error> {
    let Some(folder) = std::env::args_os().nth(1) else {
        return Err(Error::other("write the folder: seeds FOLDER"));
    };
    for (target, seeds) in laxity_fuzz::seeds() {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder)?;
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{number:03}")), seed)?;
        }
    }
    Ok(())
}
