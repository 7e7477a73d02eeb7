package webui

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"fmt"
	"net/http"
	"path"
	"strings"
	"time"
)

//go:embed assets
var assets embed.FS

// file is a static file with its headers.
type file struct {
	mediaType, tag string
	text           []byte
}

// mediaTypes are set here so that they don't depend on the machine's configuration.
var mediaTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
}

// files returns the static files by path below the page's; the page itself is "".
func files() (map[string]file, error) {
	entries, err := assets.ReadDir("assets")
	if err != nil {
		return nil, fmt.Errorf("reading the embedded files: %w", err)
	}
	out := map[string]file{}
	for _, entry := range entries {
		name := entry.Name()
		text, err := assets.ReadFile("assets/" + name)
		if err != nil {
			return nil, fmt.Errorf("reading the embedded files: %w", err)
		}
		sum := sha256.Sum256(text)
		out[strings.TrimSuffix(name, "index.html")] = file{mediaType: mediaTypes[path.Ext(name)], tag: fmt.Sprintf(`"%x"`, sum[:8]), text: text}
	}
	return out, nil
}

func (f file) serve(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Content-Type", f.mediaType)
	// The browser revalidates each file, mostly with 304 as the answer, so that an update never mixes old and new files.
	header.Set("Cache-Control", "no-cache")
	header.Set("ETag", f.tag)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.text))
}
