//! Numbers of the protocol, named as the protocol document names them, and this server's caps.

/// First word of the greeting: "NBDMAGIC".
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting and first of every option: "IHAVEOPT".
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// First word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of every simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flag and client flag: options are answered, unknown ones too.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag and client flag: no 124 zeroes behind the answer to EXPORT_NAME.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Enter transmission; the answer has no room for an error.
pub const OPT_EXPORT_NAME: u32 = 1;
/// End the negotiation.
pub const OPT_ABORT: u32 = 2;
/// Name all exports.
pub const OPT_LIST: u32 = 3;
/// Upgrade to TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Describe an export.
pub const OPT_INFO: u32 = 6;
/// Describe an export and enter transmission.
pub const OPT_GO: u32 = 7;

/// Success, and the last reply to its option.
pub const REP_ACK: u32 = 1;
/// One export of a list.
pub const REP_SERVER: u32 = 2;
/// One piece of information about an export.
pub const REP_INFO: u32 = 3;
/// Set in every reply type that is an error.
pub const REP_ERROR: u32 = 1 << 31;

/// Size and transmission flags.
pub const INFO_EXPORT: u16 = 0;
/// The export's own name.
pub const INFO_NAME: u16 = 1;
/// A text for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Smallest and preferred block, largest payload.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flag: always set.
pub const FLAG_HAS_FLAGS: u16 = 1 << 0;
/// Transmission flag: writes are refused.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: FLUSH is understood.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: the FUA command flag is understood.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// Transmission flag: TRIM is understood.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: WRITE_ZEROES is understood.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Transmission flag: a flush on one connection covers all.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;

/// Read.
pub const CMD_READ: u16 = 0;
/// Write; the data follows the request.
pub const CMD_WRITE: u16 = 1;
/// End the session; not answered.
pub const CMD_DISC: u16 = 2;
/// Make durable what was answered before.
pub const CMD_FLUSH: u16 = 3;
/// The range is not needed any more.
pub const CMD_TRIM: u16 = 4;
/// The range shall read as zeroes.
pub const CMD_WRITE_ZEROES: u16 = 6;

/// Command flag: durable before the answer.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// Command flag of WRITE_ZEROES: keep the range provisioned.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;

/// Most bytes of an export name.
pub const MAX_NAME: usize = 4096;
/// Most bytes of data with an option; longer ones are skipped, never kept.
pub const MAX_OPTION_DATA: usize = 8192;
/// Bytes of an option before its data.
pub const OPTION_HEADER: usize = 16;
/// Most bytes that [`Handshake::advance`](super::Handshake::advance) must see at once.
pub const MAX_HANDSHAKE_MESSAGE: usize = OPTION_HEADER + MAX_OPTION_DATA;
/// Most bytes of data in one read or write: 32 MiB.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Most bytes of a refused write that are read and thrown away to keep the connection; with more
/// the client is disconnected.
pub const MAX_DRAIN: u64 = 64 << 20;
/// Bytes of a request before its payload.
pub const REQUEST_HEADER: usize = 28;
