package webui

import (
	"compress/gzip"
	"embed"
	"fmt"
	"io/fs"
	"net/http"
	"strings"
)

// Path is the URL path of the page.
const Path = "/ui"

// policy allows the page to load its own files and to connect to its own server, and nothing else: no inline scripts or
// styles, no HTML from text, no framing.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

//go:embed assets
var assets embed.FS

// Handler serves Path and everything below it, and redirects "/" there.
func (b *Board) Handler() http.Handler {
	files, _ := fs.Sub(assets, "assets") // The name is valid.
	static := http.StripPrefix(Path, http.FileServerFS(files))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		harden(w.Header())
		below, ok := strings.CutPrefix(r.URL.Path, Path)
		switch {
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "the page is read-only", http.StatusMethodNotAllowed)
		case r.URL.Path == "/", ok && below == "":
			// Relative, because a proxy may have added a prefix to the path.
			w.Header().Set("Location", strings.TrimPrefix(Path, "/")+"/")
			w.WriteHeader(http.StatusFound)
		case ok && below == "/data.json":
			b.data(w, r)
		case ok && below[0] == '/':
			w.Header().Set("Cache-Control", "no-cache") // So that an update never mixes old and new files.
			static.ServeHTTP(w, r)
		default:
			http.Error(w, fmt.Sprintf("no such path: %.200q; the page is at %s/", r.URL.Path, Path), http.StatusNotFound)
		}
	})
}

func harden(header http.Header) {
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("X-Frame-Options", "DENY")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// data answers with the state, or with what has changed since a revision, if the request names one; with status 204 if that is nothing.
func (b *Board) data(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	text := b.State(r.URL.Query().Get("since"))
	if text == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	header.Set("Content-Type", "application/json")
	if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_, _ = w.Write(text) // An error means that the client disconnected.
		return
	}
	header.Set("Content-Encoding", "gzip")
	packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // The level is valid.
	_, _ = packed.Write(text)
	_ = packed.Close()
}
