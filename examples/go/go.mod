// `go mod tidy` adds what these need and go.sum.
module pyruntime-example

go 1.21

require (
	google.golang.org/grpc v1.81.1
	google.golang.org/protobuf v1.36.5
)
