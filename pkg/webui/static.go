package webui

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
)

//go:embed assets
var assets embed.FS

// file is a static file with its headers.
type file struct {
	mediaType, tag string
	plain, packed  []byte
}

// files returns the static files by path below the page's; the page itself is "".
func files() (map[string]file, error) {
	out := map[string]file{}
	err := fs.WalkDir(assets, "assets", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		plain, err := assets.ReadFile(name)
		if err != nil {
			return err
		}
		packed, err := pack(plain, gzip.BestCompression)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(plain)
		f := file{
			mediaType: mediaTypes[path.Ext(name)], plain: plain, packed: packed,
			tag: base64.RawURLEncoding.EncodeToString(sum[:12]),
		}
		if f.mediaType == "" {
			f.mediaType = mime.TypeByExtension(path.Ext(name))
		}
		served := name[len("assets/"):]
		if served == "index.html" {
			served = ""
		}
		out[served] = f
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the embedded files: %w", err)
	}
	return out, nil
}

// pack returns plain as gzip.
func pack(plain []byte, level int) ([]byte, error) {
	var packed bytes.Buffer
	packer, err := gzip.NewWriterLevel(&packed, level)
	if err == nil {
		_, err = packer.Write(plain)
	}
	if err == nil {
		err = packer.Close()
	}
	return packed.Bytes(), err
}

// mediaTypes are set here so that they don't depend on the machine's configuration.
var mediaTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

func (f file) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Type", f.mediaType)
	// The browser revalidates each file, mostly with 304 as the answer, so that an update never mixes old and new files.
	header.Set("Cache-Control", "no-cache")
	header.Add("Vary", "Accept-Encoding")
	body, tag := f.plain, `"`+f.tag+`"`
	if acceptsGzip(r) {
		body, tag = f.packed, `"`+f.tag+`-gz"`
	}
	header.Set("ETag", tag)
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	if acceptsGzip(r) {
		header.Set("Content-Encoding", "gzip")
	}
	_, _ = w.Write(body) // An error means that the client disconnected.
}
