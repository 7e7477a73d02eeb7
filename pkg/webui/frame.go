package webui

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
)

// frame is one server-sent event, shared by all viewers. It is compressed once, on first use: as deflate blocks that end
// on a byte boundary and don't refer to earlier data, so that the same bytes fit into each viewer's stream.
type frame struct {
	plain []byte

	once   sync.Once
	packed []byte
}

func newFrame(event string, seq uint64, data []byte) *frame {
	head := fmt.Sprintf("event: %s\nid: %d\ndata: ", event, seq)
	plain := make([]byte, 0, len(head)+len(data)+2)
	return &frame{plain: append(append(append(plain, head...), data...), "\n\n"...)}
}

func (f *frame) compressed() []byte {
	f.once.Do(func() {
		var out bytes.Buffer
		packer := packers.Get().(*flate.Writer)
		defer packers.Put(packer)
		packer.Reset(&out)
		// Neither fails on a buffer in memory.
		_, _ = packer.Write(f.plain)
		_ = packer.Flush()
		f.packed = out.Bytes()
	})
	return f.packed
}

// packers are idle compressors, of half a megabyte each.
var packers = sync.Pool{New: func() any {
	w, _ := flate.NewWriter(nil, flate.BestSpeed) // The level is one that there is.
	return w
}}

// stream writes frames to one viewer, uncompressed or as one gzip stream (RFC 1952).
type stream struct {
	to     io.Writer
	packed bool
	begun  bool
	sum    uint32
	size   uint32
}

func (s *stream) write(f *frame) error {
	if !s.packed {
		_, err := s.to.Write(f.plain)
		return err
	}
	if !s.begun {
		s.begun = true
		if _, err := s.to.Write([]byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff}); err != nil {
			return err
		}
	}
	s.sum = crc32.Update(s.sum, crc32.IEEETable, f.plain)
	s.size += uint32(len(f.plain))
	_, err := s.to.Write(f.compressed())
	return err
}

// end completes a gzip stream with an empty last block, the checksum and the size.
func (s *stream) end() error {
	if !s.begun {
		return nil
	}
	tail := []byte{0x03, 0x00}
	tail = binary.LittleEndian.AppendUint32(tail, s.sum)
	tail = binary.LittleEndian.AppendUint32(tail, s.size)
	_, err := s.to.Write(tail)
	return err
}
