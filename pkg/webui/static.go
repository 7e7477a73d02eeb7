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

// file is a static file as it is served.
type file struct {
	mediaType, tag string
	plain, packed  []byte
}

// files are the static files by their paths below the page's; the page itself is "".
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
		return nil, fmt.Errorf("reading the page's own files: %w", err)
	}
	return out, nil
}

// pack makes gzip of it.
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

// mediaTypes don't depend on what the machine has installed.
var mediaTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

func (f file) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Type", f.mediaType)
	// Asked for anew each time, and mostly answered by "as you have it": after an update nobody sees half of the old page.
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
	_, _ = w.Write(body) // Who went away needs no answer.
}
