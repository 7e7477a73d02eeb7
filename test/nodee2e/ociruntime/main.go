// ociruntime stands between containerd and runc in the node's tests: ociruntime RUNC DRIVER ARGUMENTS... changes the
// specification of a new container and runs runc with the arguments.
//
//   - On a machine without the controllers of cgroup version 2 it drops the container's resources, which runc couldn't apply. Its
//     cgroup is made all the same.
//   - It drops the seccomp profile, because runc is built without the C library for it.
//   - It records the ID of each container that it creates, as a file in the folder "created" beside it: containerd forgets a container
//     whose start fails, and then its cgroup can stay.
//   - With a DRIVER, the driver's folder, it replaces NVIDIA's container runtime: it mounts the driver library into each
//     container whose environment requests cards. Here this is the fake library with the files that it reads.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fakenvml"
)

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "ociruntime:", err)
		os.Exit(1)
	}
}

func run(runc, driver string, args []string) error {
	if bundle := slices.Index(args, "--bundle"); slices.Contains(args, "create") && bundle >= 0 && bundle+1 < len(args) {
		if err := change(filepath.Join(args[bundle+1], "config.json"), driver); err != nil {
			return err
		}
		if err := record(args[len(args)-1]); err != nil {
			return err
		}
	}
	return syscall.Exec(runc, append([]string{runc}, args...), os.Environ())
}

// record records a container's ID.
func record(id string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	created := filepath.Join(filepath.Dir(program), "created")
	return errors.Join(os.MkdirAll(created, 0o755), os.WriteFile(filepath.Join(created, id), nil, 0o600))
}

// change changes the specification of a container in a file.
func change(path, driver string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if driver != "" {
		mountDriver(spec, driver)
	}
	complete, err := hasControllers()
	if err != nil {
		return err
	}
	linux, _ := spec["linux"].(map[string]any)
	delete(linux, "seccomp")
	if !complete {
		delete(linux, "resources")
	}
	if data, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

// hasControllers reports whether the machine has the controllers for the resources of containers.
func hasControllers() (bool, error) {
	text, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		return false, err
	}
	controllers := bytes.Fields(text)
	for _, needed := range []string{"cpu", "cpuset", "memory", "pids"} {
		if !slices.ContainsFunc(controllers, func(c []byte) bool { return string(c) == needed }) {
			return false, nil
		}
	}
	return true, nil
}

// mountDriver mounts the library at Debian's path for it and sets the path of its files, if the container requests cards.
func mountDriver(spec map[string]any, driver string) {
	process, _ := spec["process"].(map[string]any)
	environment, _ := process["env"].([]any)
	requests := false
	for _, variable := range environment {
		text, _ := variable.(string)
		requests = requests || strings.HasPrefix(text, protocol.EnvVisibleDevices+"=")
	}
	if !requests {
		return
	}
	mounts, _ := spec["mounts"].([]any)
	bind := func(source, destination string) {
		mounts = append(mounts, map[string]any{
			"source": source, "destination": destination, "type": "bind", "options": []string{"rbind", "ro"},
		})
	}
	bind(driver, driver)
	triplets, _ := filepath.Glob("/usr/lib/*-linux-gnu/libc.so.6")
	for _, library := range triplets {
		bind(filepath.Join(driver, "libnvidia-ml.so.1"), filepath.Join(filepath.Dir(library), "libnvidia-ml.so.1"))
	}
	for _, variable := range fakenvml.NewMachine(driver).Env() {
		environment = append(environment, variable)
	}
	spec["mounts"], process["env"] = mounts, environment
}
