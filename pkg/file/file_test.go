package file

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f.json")
	var before os.FileInfo
	for _, content := range []string{"a", "b"} {
		check.Must(t, Replace(path, []byte(content)))
		got, _ := os.ReadFile(path)
		info, err := os.Stat(path)
		if string(got) != content || err != nil || info.Mode() != 0o644 {
			t.Errorf("%q, %v, want %q", got, info, content)
		}
		if Same(before, info) || !Same(info, info) {
			t.Error("it can't be seen that the file was replaced")
		}
		before = info
	}
	check.Must(t, os.Remove(path))
	if err := os.Mkdir(path, 0o755); err != nil { // A file can't replace a directory.
		t.Fatal(err)
	}
	err := Replace(path, nil)
	if entries, _ := os.ReadDir(dir); err == nil || len(entries) != 1 {
		t.Errorf("%v, %v, want an error and no new file", err, entries)
	}
}
