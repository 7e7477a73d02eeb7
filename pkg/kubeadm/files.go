package kubeadm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// replace writes a file by a rename, so that nobody sees half of it, and syncs it. The temporary file lies in dir, on the
// same file system but outside the folder that the kubelet watches. Only root may read it: it may hold a key.
func replace(dir, path string, data []byte) error {
	temporary, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	defer os.Remove(temporary.Name()) // Gone after the rename.
	_, err = temporary.Write(data)
	err = errors.Join(err, temporary.Chmod(0o600), temporary.Sync(), temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), path)
	}
	if err == nil {
		err = syncFolder(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}
