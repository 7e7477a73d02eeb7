// Command images writes one of our images as an OCI image layout, without a container engine. hack/images/build.sh runs it and packs the
// layout into an archive. `make images` builds the same images with an engine. Both use the files from rootfs.sh, and the Dockerfile's user,
// entry point and labels.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

// options are the command's flags.
type options struct {
	dockerfile, layer, arch, name, layout string
	args                                  map[string]string
}

func main() {
	o := options{args: map[string]string{}}
	flag.StringVar(&o.dockerfile, "dockerfile", "", "Dockerfile whose last stage describes the image")
	flag.StringVar(&o.layer, "layer", "", "tar file of the image's file system")
	flag.StringVar(&o.arch, "arch", runtime.GOARCH, "architecture")
	flag.StringVar(&o.name, "name", "", "name of the image, with registry and tag")
	flag.StringVar(&o.layout, "layout", "", "folder to write the OCI image layout to; it is replaced")
	flag.Func("arg", "NAME=VALUE for an ARG of the Dockerfile; may be repeated", func(s string) error {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want NAME=VALUE")
		}
		o.args[name] = value
		return nil
	})
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(o options) error {
	if _, err := name.NewTag(o.name); err != nil {
		return err
	}
	text, err := os.ReadFile(o.dockerfile)
	if err != nil {
		return fmt.Errorf("reading the Dockerfile: %w", err)
	}
	stage, err := parse(string(text), o.args)
	if err != nil {
		return fmt.Errorf("%s: %w", o.dockerfile, err)
	}
	image, err := newImage(o.layer, o.arch, stage)
	if err != nil {
		return err
	}
	return writeLayout(o.layout, o.name, o.arch, image)
}
