// The images are built by a container engine from the Dockerfiles (`make images`), or, where there is none, as OCI
// archives by this program (hack/images/build.sh). Files come from rootfs.sh in both cases; user, entry point and labels
// stand in the Dockerfile and are read from there.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	flags := flag.NewFlagSet("images", flag.ExitOnError)
	dockerfile := flags.String("dockerfile", "", "whose last stage describes the image")
	rootfs := flags.String("rootfs", "", "folder with the image's file system")
	arch := flags.String("arch", runtime.GOARCH, "architecture")
	name := flags.String("name", "", "the image's whole name, with the tag")
	output := flags.String("o", "", "file to write the archive to")
	args := map[string]string{}
	flags.Func("arg", "NAME=VALUE for an ARG; may be repeated", func(s string) error {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return errors.New("want NAME=VALUE")
		}
		args[name] = value
		return nil
	})
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	text, err := os.ReadFile(*dockerfile)
	if err != nil {
		return fmt.Errorf("reading the Dockerfile: %w", err)
	}
	image, err := parse(string(text), args)
	if err != nil {
		return fmt.Errorf("%s: %w", *dockerfile, err)
	}
	file, err := os.Create(*output)
	if err != nil {
		return fmt.Errorf("writing the archive: %w", err)
	}
	if err := errors.Join(write(file, *rootfs, *arch, *name, image), file.Close()); err != nil {
		return fmt.Errorf("%s: %w", *name, err)
	}
	fmt.Println(*output, "is", *name)
	return nil
}
