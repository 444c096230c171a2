//! Results as JSON objects. Sizes are bytes, times seconds since 1970.

use forkdisk::VolumeInfo;
use serde::Serialize;

/// A volume or snapshot.
#[derive(Serialize)]
pub struct VolumeRecord {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    referenced: u64,
    chunk: u64,
    /// `null` when it was not cloned from anything.
    origin: Option<String>,
    created: u64,
}

/// `volume` or `snapshot`.
pub fn kind(info: &VolumeInfo) -> &'static str {
    if info.snapshot { "snapshot" } else { "volume" }
}

impl From<&VolumeInfo> for VolumeRecord {
    fn from(info: &VolumeInfo) -> VolumeRecord {
        VolumeRecord {
            name: info.name.clone(),
            kind: kind(info),
            size: info.size,
            referenced: info.referenced,
            chunk: info.chunk,
            origin: (!info.origin.is_empty()).then(|| info.origin.clone()),
            created: info.created,
        }
    }
}

/// A pool's identity as text, in the usual five groups.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_five_groups() {
        let uuid = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(&uuid), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
