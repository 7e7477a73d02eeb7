// Package file replaces files of a node at once, so that no reader sees a part of one, and detects that a file was replaced.
package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// newSuffix follows in the name of a file that is being written. Container runtimes read CDI specifications whose names end with .json or .yaml.
const newSuffix = ".new-"

// Replace replaces the file, or creates it. All users can read it. It isn't synced: it need not survive a crash of the machine.
func Replace(path string, data []byte) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+newSuffix+"*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	_, err = file.Write(data)
	if err = errors.Join(err, file.Chmod(0o644), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// Same reports whether both are one file in the same state. A new file can get the inode of a deleted one. Both can be nil.
func Same(a, b fs.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
