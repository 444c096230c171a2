//! The file with the number of the serving process.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A file with this process's number, removed when dropped unless another process has replaced it.
pub struct PidFile {
    path: PathBuf,
}

impl PidFile {
    /// Writes it, replacing an existing file: this process holds the pool's lock.
    pub fn write(path: &Path) -> Result<PidFile> {
        let text = format!("{}\n", std::process::id());
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
        written.with_context(|| format!("{}: the process number cannot be written", path.display()))?;
        Ok(PidFile { path: path.to_path_buf() })
    }

    /// Leaves the file to the next process.
    pub fn keep(mut self) {
        self.path = PathBuf::new();
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let is_ours = fs::read_to_string(&self.path).is_ok_and(|text| text.trim() == std::process::id().to_string());
        if is_ours {
            // A failure has no effect: the next server replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}
