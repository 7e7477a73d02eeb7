package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// The media types of the OCI image format, version 1.
const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// write writes an OCI archive of one image of one layer. The same files make the same archive, to the byte.
func write(out io.Writer, rootfs, arch, name string, image stage) error {
	layer, err := pack(rootfs)
	if err != nil {
		return err
	}
	compressed, err := compress(layer)
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": arch, "os": "linux",
		"config": map[string]any{"User": image.user, "Entrypoint": image.entrypoint, "Labels": image.labels},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": mediaManifest,
		"config":      describe(mediaConfig, config),
		"layers":      []descriptor{describe(mediaLayer, compressed)},
		"annotations": image.labels,
	})
	if err != nil {
		return err
	}
	entry := describe(mediaManifest, manifest)
	entry.Platform = &platform{Architecture: arch, OS: "linux"}
	// containerd and Docker go by the one, everything else by the other.
	entry.Annotations = map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": path.Base(name)}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": mediaIndex, "manifests": []descriptor{entry}})
	if err != nil {
		return err
	}
	writer := tar.NewWriter(out)
	for _, file := range []struct {
		name    string
		content []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
		{blob(manifest), manifest}, {blob(config), config}, {blob(compressed), compressed},
	} {
		if err := writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: file.name, Mode: 0o644, Size: int64(len(file.content))}); err != nil {
			return fmt.Errorf("writing %s: %w", file.name, err)
		}
		if _, err := writer.Write(file.content); err != nil {
			return fmt.Errorf("writing %s: %w", file.name, err)
		}
	}
	return writer.Close()
}

func describe(media string, content []byte) descriptor {
	return descriptor{MediaType: media, Digest: digest(content), Size: len(content)}
}

func digest(content []byte) string { return "sha256:" + sum(content) }

func blob(content []byte) string { return "blobs/sha256/" + sum(content) }

func sum(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// pack makes a layer of a folder, everything root's and without times.
func pack(rootfs string) ([]byte, error) {
	var out bytes.Buffer
	writer := tar.NewWriter(&out)
	err := filepath.WalkDir(rootfs, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == rootfs {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		target := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if target, err = os.Readlink(path); err != nil {
				return err
			}
		}
		header, err := tar.FileInfoHeader(info, target)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(rootfs, path)
		if err != nil {
			return err
		}
		clean := tar.Header{Typeflag: header.Typeflag, Name: filepath.ToSlash(name), Linkname: header.Linkname, Mode: header.Mode & 0o777, Size: header.Size}
		if info.IsDir() {
			clean.Name += "/"
		}
		if err := writer.WriteHeader(&clean); err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		_, err = writer.Write(content)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("packing %s: %w", rootfs, err)
	}
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("packing %s: %w", rootfs, err)
	}
	return out.Bytes(), nil
}

func compress(content []byte) ([]byte, error) {
	var out bytes.Buffer
	writer := gzip.NewWriter(&out)
	if _, err := writer.Write(content); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("compressing: %w", err)
	}
	return out.Bytes(), nil
}
