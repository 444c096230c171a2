//! Constants of the protocol, named as in the protocol document, and limits of this server.

/// First word of the greeting: "NBDMAGIC".
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting and first of every option: "IHAVEOPT".
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// First word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of every request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of every simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of every chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of every chunk of a reply with an extended header.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flag and client flag: options are answered, unknown ones too.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag and client flag: no 124 zeroes after the answer to EXPORT_NAME.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Enter transmission; this option has no error reply.
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
/// Answer reads in chunks.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Name the metadata contexts of an export.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Choose the metadata contexts that BLOCK_STATUS reports.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Requests and replies with 64-bit lengths; implies structured replies.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Success, and the last reply to its option.
pub const REP_ACK: u32 = 1;
/// One export of a list.
pub const REP_SERVER: u32 = 2;
/// One piece of information about an export.
pub const REP_INFO: u32 = 3;
/// One metadata context.
pub const REP_META_CONTEXT: u32 = 4;
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
/// Transmission flag: the DF command flag is understood. Only with structured replies.
pub const FLAG_SEND_DF: u16 = 1 << 7;
/// Transmission flag: a flush on one connection covers all.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// Transmission flag: CACHE is understood.
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
/// Transmission flag: the FAST_ZERO command flag is understood.
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Read.
pub const CMD_READ: u16 = 0;
/// Write; the data follows the request.
pub const CMD_WRITE: u16 = 1;
/// End the session; not answered.
pub const CMD_DISC: u16 = 2;
/// Make durable what was answered before.
pub const CMD_FLUSH: u16 = 3;
/// Discard the range.
pub const CMD_TRIM: u16 = 4;
/// Prefetch the range.
pub const CMD_CACHE: u16 = 5;
/// Make the range read as zeroes.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// Return the status of the range in the chosen metadata contexts.
pub const CMD_BLOCK_STATUS: u16 = 7;

/// Command flag: durable before the answer.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// Command flag of WRITE_ZEROES: keep the range provisioned.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// Command flag of READ: answer with one piece of data, or with an error.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// Command flag of BLOCK_STATUS: one extent of each context suffices.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Command flag of WRITE_ZEROES: fail at once if it is not faster than a write.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// Command flag with extended headers: the length is that of the payload that follows.
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// Flag of a chunk: the last one of its reply.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;
/// Chunk: nothing.
pub const CHUNK_NONE: u16 = 0;
/// Chunk: an offset, and the data from there.
pub const CHUNK_OFFSET_DATA: u16 = 1;
/// Chunk: an offset, and how many bytes from there are zero.
pub const CHUNK_OFFSET_HOLE: u16 = 2;
/// Chunk: a context and its extents, in 32 bits.
pub const CHUNK_BLOCK_STATUS: u16 = 5;
/// Chunk: a context and its extents, in 64 bits.
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
/// Chunk: an error and a text.
pub const CHUNK_ERROR: u16 = (1 << 15) + 1;
/// Chunk: an error, a text, and the offset where it happened.
pub const CHUNK_ERROR_OFFSET: u16 = (1 << 15) + 2;

/// `base:allocation`: not provisioned.
pub const STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;
/// `qemu:dirty-bitmap:…`: may have changed.
pub const STATE_DIRTY: u32 = 1 << 0;

/// Most bytes of an export name.
pub const MAX_NAME: usize = 4096;
/// Most bytes of data with an option; longer data is skipped, never stored.
pub const MAX_OPTION_DATA: usize = 32 << 10;
/// Most queries in LIST_META_CONTEXT or SET_META_CONTEXT.
pub const MAX_QUERIES: usize = 128;
/// Most metadata contexts that a session can choose.
pub const MAX_CONTEXTS: usize = 32;
/// Bytes of an option before its data.
pub const OPTION_HEADER: usize = 16;
/// Most bytes that [`Handshake::advance`](super::Handshake::advance) needs at once.
pub const MAX_HANDSHAKE_MESSAGE: usize = OPTION_HEADER + MAX_OPTION_DATA;
/// Most bytes of data in one read or write: 32 MiB.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Most bytes of a refused write that are received and dropped to keep the connection; with more
/// the client is disconnected.
pub const MAX_DRAIN: u64 = 64 << 20;
/// Bytes of a request before its payload.
pub const REQUEST_HEADER: usize = 28;
/// Bytes of a request with an extended header before its payload.
pub const EXTENDED_REQUEST_HEADER: usize = 32;
